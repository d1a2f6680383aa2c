#!/bin/sh
# Fetch what the recipe is made from, as Debian packages, into a folder; needs no root and installs nothing.
#   prepare.sh FOLDER   ->   FOLDER/lib: Flite and its voices (19 MB), FOLDER/share: word lists for text.py
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
apt-get -q download libflite1 libasound2 wamerican scowl wordnet-base
for package in *.deb; do dpkg -x "$package" root; done
mkdir -p "$folder/lib" "$folder/share/dict"
for name in asound.so.2 flite.so.1 flite_cmulex.so.1 flite_usenglish.so.1 \
    flite_cmu_us_slt.so.1 flite_cmu_us_rms.so.1 flite_cmu_us_awb.so.1 flite_cmu_us_kal16.so.1; do
    cp -L root/usr/lib/*/"lib$name" "$folder/lib/"
done
cp root/usr/share/dict/american-english "$folder/share/dict/"
cp -r root/usr/share/dict/scowl "$folder/share/dict/"
cp -r root/usr/share/wordnet "$folder/share/"
