"""Values and rules that everything else stands on."""
