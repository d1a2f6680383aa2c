"""The teacher Kokoro-82M: fetched, converted and run by our own code, for the recipe of the built-in voice alone."""
