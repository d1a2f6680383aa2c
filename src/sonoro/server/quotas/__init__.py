"""What each API key may use of a server, and has used. One can delete this folder and its calls in `gate.py`."""
