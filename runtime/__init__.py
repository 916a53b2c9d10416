"""What touches devices: nothing here plans."""
