"""The attention classes, each of which exchanges other tensors between the ranks."""
