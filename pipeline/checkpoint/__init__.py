"""What a checkpoint and a target are, whatever their format, and the interface that every format implements; pure."""
