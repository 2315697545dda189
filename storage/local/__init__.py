"""Folders on disks of this machine."""
