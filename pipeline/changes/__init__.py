"""What a conversion alters on request: tensors dropped, added, taken from elsewhere, given other names and layouts."""
