#!/bin/sh
# Run tests on an emulated ARM processor, the CPU kernel's by default: scripts/emulate_arm.sh FOLDER [arguments of pytest]
#
# The first time FOLDER gets Debian's Python 3.11 for arm64, and torch and what tests need for aarch64 in the versions of
# .venv: 5 GB. Needs Debian 12 with the packages qemu-user and g++-aarch64-linux-gnu (and qemu-user-binfmt for tests that
# start processes), and once, as root: dpkg --add-architecture arm64 && apt-get update.
# QEMU_CPU chooses the processor: neoverse-n1 multiplies bytes, but no bfloat16.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$1" && folder=$(cd "$1" && pwd) && shift
system=$folder/system site=$folder/site

if [ ! -f "$folder/ready" ]; then
  mkdir -p "$system" "$folder/packages"
  cd "$folder/packages"
  for name in python3.11 python3.11-minimal libpython3.11-minimal libpython3.11-stdlib libc6 libstdc++6 libgcc-s1 zlib1g \
    libexpat1 libssl3 libffi8 libbz2-1.0 liblzma5 libsqlite3-0 libuuid1 libgomp1 libcrypt1; do
    apt-get download "$name:arm64"
  done
  for package in *.deb; do dpkg-deb -x "$package" "$system"; done
  # triton is what torch of Linux comes with, and nvidia's libraries are what it links to
  "$root/.venv/bin/pip" freeze --all --exclude-editable | sed 's/+[a-z0-9]*$//' | grep -iE '^(nvidia-[^=]*|torch|torchvision|triton'\
'|numpy|pillow|pydantic|pydantic_core|annotated-types|typing-inspection|typing_extensions|filelock|jinja2|markupsafe|networkx'\
'|ruamel.yaml|safetensors|tabulate|tqdm|typer|annotated-doc|rich|shellingham|pygments|markdown-it-py|mdurl|sympy|mpmath'\
'|fsspec|pytest|pluggy|iniconfig|packaging|hypothesis|sortedcontainers|setuptools)==' > needed.txt
  for tag in 2014 _2_17 _2_18 _2_24 _2_25 _2_27 _2_28; do tags="${tags:-} --platform manylinux${tag}_aarch64"; done
  # one by one, as several lie in one folder and what has no wheel for aarch64 is left out
  mkdir -p "$site"
  while read -r one; do
    "$root/.venv/bin/pip" install --quiet --no-deps --only-binary=:all: --python-version 3.11 $tags \
      --platform manylinux2014_sbsa --target part "$one" < /dev/null || { echo "left out: $one"; continue; }
    cp -r part/. "$site" && rm -r part
  done < needed.txt
  # torch asks what the processor is: what the emulator does not answer, files do
  mkdir -p "$system/proc"
  for core in 0 1; do
    about=$system/sys/devices/system/cpu/cpu$core/regs/identification
    mkdir -p "$about" && echo 0x00000000410fd0c1 > "$about/midr_el1"
    printf 'processor\t: %s\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU architecture: 8\n' $core
    printf 'CPU variant\t: 0x1\nCPU part\t: 0xd0c\nCPU revision\t: 1\n\n'
  done > "$system/proc/cpuinfo"
  rm -r "$folder/packages"
  touch "$folder/ready"
fi

cd "$root"
[ $# -gt 0 ] || set -- tests/codegen/test_cpu_*.py tests/acm
export QEMU_LD_PREFIX="$system" QEMU_CPU="${QEMU_CPU:-max,sve=off}" XDG_CACHE_HOME="$folder/cache"
export CXX="$(command -v aarch64-linux-gnu-g++)" PYTHONPATH="$site:$root" PYTHONDONTWRITEBYTECODE=1 OMP_NUM_THREADS=1
exec qemu-aarch64 "$system/usr/bin/python3.11" -m pytest -p no:cacheprovider "$@"
