#!/usr/bin/env bash
# Uses the wheel with every Python that README names and this machine has, on PATH or in pyenv's folder: the demo, what
# reads a manifest again, and a sample of the tests, S3 on moto included. Paddle (2 GB) is not installed.
#   tests/pythons.sh UV DIST FOLDER    the command uv, the folder of the wheel, and a folder for environments
set -eu
uv=$(realpath "$1") wheel=$(realpath "$2"/*.whl) folder=$(realpath "$3")
cd "$(dirname "$0")/.."
checkpoint=$PWD/tests/golden/cases/mp2pp2sh2_s1v2_meta_ema
sample=(
  tests/unit/test_{errors,literals,metadata,options,typed_json}.py
  tests/unit/test_output.py::test_a_stream_that_python_collects_leaves_the_inner_one_alone
  tests/golden/test_small_files.py
  tests/hostile/test_modes.py
  tests/storage/test_stores.py::test_conversions_there_and_back_give_the_bytes_that_they_give_on_a_disk
  tests/storage/test_targets.py::test_a_bucket_can_be_the_whole_location
  tests/storage/test_conversions.py::test_overwrite_leaves_nothing_of_the_old_checkpoint
)
ask='import platform, sys; print(platform.python_version(), sys.executable)'

pythons() {
  for minor in 10 11 12 13; do
    { type -aP "python3.$minor"; ls "$(pyenv root)/versions"/3.$minor.*/bin/python3.$minor; } 2>/dev/null || true
  done | while read -r python; do
    "$python" -c "$ask" 2>/dev/null || true  # pyenv has a command for a Python that it would not start
  done | sort -uV -k 1,1 | awk -F. '!seen[$2]++'  # of each minor release the oldest patch: it has the least
}

use() (
  mkdir -p "$folder/$version" && cd "$folder/$version"
  "$uv" venv --quiet --python "$1" env
  "$uv" pip install --quiet --python env/bin/python "$wheel[arrow,s3]" \
    boto3 'hypothesis>=6.100' 'jsonschema>=4.20' 'moto[server]>=5' 'pytest>=8' 'pytest-xdist>=3' 'safetensors>=0.4.3'
  export PATH=$PWD/env/bin:$PATH
  paddle-reshard convert "$checkpoint/checkpoint-3" one-card --to tp=1 --quiet
  python "$OLDPWD/tests/golden/compare_one_card.py" one-card "$checkpoint/truth.safetensors"
  paddle-reshard verify one-card
  paddle-reshard convert "$checkpoint/checkpoint-3" one-card --to tp=1 --resume
  paddle-reshard convert "$checkpoint/checkpoint-3" one-card --to tp=2 --overwrite --quiet
  paddle-reshard verify "$checkpoint/checkpoint-3" one-card
  cd "$OLDPWD"
  python -m pytest -q -n auto -p no:cacheprovider --hypothesis-profile light "${sample[@]}"
)

found=$(pythons)
while read -r version python; do
  echo "== Python $version"
  use "$python" < /dev/null
  rm -rf "${folder:?}/$version"
done <<< "${found:?no Python 3.10 to 3.13 is here}"
