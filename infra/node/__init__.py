"""What the head has done on a host; standard library only, and quick to start."""
