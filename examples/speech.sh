#!/bin/sh
# Speech from `sonoro serve` with curl, into files of the current folder. Usage: speech.sh [URL]
set -eu
url=${1:-http://127.0.0.1:8000}

# Whole, as MP3.
curl --fail-with-body --silent --show-error "$url/v1/audio/speech" --json '{
  "model": "tts-1",
  "voice": "alloy",
  "input": "Hello there. This was spoken on your own machine."
}' --output hello.mp3

# As it is made: 16 bit samples, which a player can take from a pipe, such as `| ffplay -f s16le -ar 24000 -`.
curl --fail-with-body --silent --show-error --no-buffer "$url/v1/audio/speech" --json '{
  "input": "The first words of this are heard before the last are made.",
  "response_format": "pcm",
  "seed": 7
}' > hello.pcm
