"""What the device can do at best, measured on it."""
