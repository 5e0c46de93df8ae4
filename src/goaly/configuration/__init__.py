"""How settings are read, checked and explained; `goaly/config.py` is the door."""
