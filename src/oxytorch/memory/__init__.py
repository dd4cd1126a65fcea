"""Memory of devices and of the host: an allocator, its statistics, traces and what they show."""
