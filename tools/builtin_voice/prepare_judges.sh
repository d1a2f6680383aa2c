#!/bin/sh
# Fetch the judges of builtin_voice.evaluate into a folder (66 MB): Moonshine base, its tokenizer, DNSMOS.
set -eu
folder=$(mkdir -p "$1" && cd "$1" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cd "$scratch"
npm pack --silent @usefulsensors/moonshine-js@0.1.9
tar -xzf usefulsensors-moonshine-js-0.1.9.tgz
cp package/dist/model/base/quantized/encoder_model.onnx package/dist/model/base/quantized/decoder_model_merged.onnx "$folder/"
pip install -q --no-deps --target wheels useful-moonshine-onnx==20251121 speechmos==0.0.1.1
cp wheels/moonshine_onnx/assets/tokenizer.json "$folder/"
cp wheels/speechmos/dnsmos_models/model_v8.onnx wheels/speechmos/dnsmos_models/sig_bak_ovr.onnx "$folder/"
cd "$folder"
sha256sum --quiet --check <<'END'
1dd9ab0a7f987113d30affcba5a068d11c8f90fa0223caa3e491ade431ad9751  encoder_model.onnx
cc9f3cd6698a369c6008b41aa60aa3fb3322e7f03c9bdf19d8e6b7200afca4f3  decoder_model_merged.onnx
b68b995a58b3373db6c4f46864a9db50cd1333d086150ffa2c1096581ede9c10  tokenizer.json
9246480c58567bc6affd4200938e77eef49468c8bc7ed3776d109c07456f6e91  model_v8.onnx
269fbebdb513aa23cddfbb593542ecc540284a91849ac50516870e1ac78f6edd  sig_bak_ovr.onnx
END
