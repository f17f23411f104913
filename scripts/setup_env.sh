#!/usr/bin/env bash
# Make .venv and install this machine's pinned stack: requirements/gpu.txt if nvidia-smi answers, else
# requirements/cpu.txt. Idempotent: a second call returns at once, a half-made .venv is repaired, a changed lock applied.
set -euo pipefail

usage() {
    cat <<'EOF'
Usage: bash scripts/setup_env.sh [--check]
  --check   check platform, git, compiler, Python, disk and memory; install nothing
Environment:
  PYTHON            Python 3.11, 3.12 or 3.13 for .venv; default: the first of python3.11 to python3.13, python3
  RETOOL_HARDWARE   cpu or gpu; default: gpu if `nvidia-smi -L` succeeds, else cpu
  RETOOL_FLASH_ATTN (gpu only) 1 compiles flash-attn (default); a path to a wheel installs that wheel; 0 continues without
                    it: runs are slower and need +hardware=no_flash_attn (SFT: no_flash_attn_sft). Later calls keep the
                    choice
  MAX_JOBS, FLASH_ATTN_CUDA_ARCHS   for that compilation; default: from cores and free memory, and from this machine's GPU
uv installs: the one on PATH, or the lock's; pip does where neither can be had. Both follow pip's configuration and
variables (index, find-links, certificate) and check the lock's hashes. Log: .venv/install.log
EOF
}

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
VENV=$ROOT/.venv
LOG=$VENV/install.log
STAMP=$VENV/retool-env.txt
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
SECONDS=0

# Only what is in .venv counts, and pip must not wait for an answer.
unset PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1 PYTHONUNBUFFERED=1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_USER=0 PIP_ROOT_USER_ACTION=ignore PIP_PROGRESS_BAR=off

say() { printf '[setup] %s\n' "$*"; }
die() {
    printf '[setup] error: %s\n' "$*" >&2
    exit 1
}

# ---- what this machine is and has -----------------------------------------------------------------------------------

hardware() { # the rule of verl_ext/versions.py: detect_hardware
    if [ -n "${RETOOL_HARDWARE:-}" ]; then
        echo "$RETOOL_HARDWARE"
    elif command -v nvidia-smi >/dev/null && nvidia-smi -L >/dev/null 2>&1; then
        echo gpu
    else
        echo cpu
    fi
}

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
is_supported() { [[ $1 =~ ^3\.1[123]$ ]]; }

find_python() {
    local candidate version seen=""
    local candidates=(python3.11 python3.12 python3.13 python3)
    [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
    for candidate in "${candidates[@]}"; do
        version=$(python_version "$candidate") || { seen+="$candidate does not run; " && continue; }
        is_supported "$version" || { seen+="$candidate is $version; " && continue; }
        "$candidate" -c 'import ensurepip, venv' 2>/dev/null ||
            die "$candidate (Python $version) has no venv module. Install it, e.g. apt install python$version-venv"
        [ "$HARDWARE" = gpu ] || "$candidate" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
            die "libnuma.so.1 was not found, and vLLM for CPUs needs it. Install it, e.g. apt install libnuma1"
        command -v "$candidate"
        return
    done
    die "Python 3.11, 3.12 or 3.13 was not found (${seen%; })." \
        "Install one, e.g. apt install python3.11 python3.11-venv, or set PYTHON to its path"
}

check_machine() {
    local platform
    platform=$(uname -sm)
    [ "$platform" = "Linux x86_64" ] ||
        die "this is $platform, and the pinned wheels are for Linux x86_64." \
            "Use such a machine, or a linux/amd64 container"
    getconf GNU_LIBC_VERSION >/dev/null 2>&1 ||
        die "this system has no glibc (Alpine?), and the pinned wheels need glibc 2.28 or newer. Use another distribution"
    case $HARDWARE in cpu | gpu) ;; *) die "RETOOL_HARDWARE is '$HARDWARE', expected cpu or gpu" ;; esac
    command -v git >/dev/null ||
        die "git was not found; each run records its revision. Install it, e.g. apt install git"
    command -v "${CC:-gcc}" >/dev/null || command -v cc >/dev/null ||
        die "no C compiler was found (gcc or cc); torch.compile and packages without a wheel use one." \
            "Install it, e.g. apt install gcc g++"
    local memory_gb
    memory_gb=$(awk '/^MemTotal/ {print int($2 / 1024 / 1024)}' /proc/meminfo)
    [ "$memory_gb" -ge 16 ] || say "warning: $memory_gb GB of memory; the quickstart needs 4 GB, with --model small 16 GB"
}

cuda_major() { # of the lock's torch
    grep -oE '^cuda-toolkit==[0-9]+' "$LOCK" | grep -oE '[0-9]+$'
}

find_nvcc() { # where torch/utils/cpp_extension.py (2.11) looks
    local home=${CUDA_HOME:-${CUDA_PATH:-}} nvcc
    nvcc=$(if [ -n "$home" ]; then echo "$home/bin/nvcc"; else command -v nvcc || echo /usr/local/cuda/bin/nvcc; fi)
    [ -x "$nvcc" ] && echo "$nvcc"
}

within_groups() { # $1 GB of memory, or the limit of the smallest control group around this process (container, job), if less
    local gb=$1 root=${CGROUP_ROOT:-} controllers folder name limit
    [ ! -r "$root/proc/self/cgroup" ] || while IFS=: read -r _ controllers folder; do
        case $controllers in
            "") folder=/sys/fs/cgroup$folder name=memory.max ;; # version 2
            memory) folder=/sys/fs/cgroup/memory$folder name=memory.limit_in_bytes ;; # version 1
            *) continue ;;
        esac
        while [ -n "$folder" ]; do # the limits of the outer groups hold as well
            limit=$(cat "$root$folder/$name" 2>/dev/null || true)
            case $limit in
                "" | *[!0-9]*) ;;
                *) [ $((limit / 1000000000)) -ge "$gb" ] || gb=$((limit / 1000000000)) ;;
            esac
            folder=${folder%/*}
        done
    done <"$root/proc/self/cgroup"
    echo "$gb"
}

# flash-attn 2.8.3 names architectures 80, 90, 100 and 120 (its setup.py:179-191): one for each major capability from 8 on.
gpu_architectures() {
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | sort -u | while IFS=. read -r major _; do
        case $major in 8) echo 80 ;; 9) echo 90 ;; 10) echo 100 ;; 12) echo 120 ;; [0-9]*) echo "none:$major" ;; esac
    done | sort -u | paste -sd ';'
}

# $1: Python. Check what compiling flash-attn needs, before 10 GB are installed; sets MAX_JOBS and FLASH_ATTN_CUDA_ARCHS.
check_flash_attn() {
    local otherwise nvcc release memory_gb architectures
    otherwise="Or continue without flash-attn: RETOOL_FLASH_ATTN=0 (slower, see --help)"
    case $FLASH_ATTN in
        0) return ;;
        1) ;;
        *.whl)
            [ -f "$FLASH_ATTN" ] || die "RETOOL_FLASH_ATTN=$FLASH_ATTN is no file"
            return
            ;;
        *) die "RETOOL_FLASH_ATTN is '$FLASH_ATTN', expected 0, 1 or a path to a wheel" ;;
    esac
    nvcc=$(find_nvcc) || die "nvcc was not found (PATH, CUDA_HOME, /usr/local/cuda); flash-attn has no wheel and is" \
        "compiled with it. Install the CUDA $(cuda_major) toolkit, or set CUDA_HOME. $otherwise"
    release=$("$nvcc" --version | grep -oE 'release [0-9]+\.[0-9]+' | cut -d ' ' -f 2) || true
    [ "${release%%.*}" = "$(cuda_major)" ] || die "$nvcc is from CUDA ${release:-?}, but the locked torch is built for" \
        "CUDA $(cuda_major) and compiles with no other. Install that toolkit, or set CUDA_HOME. $otherwise"
    command -v "${CXX:-g++}" >/dev/null || command -v c++ >/dev/null ||
        die "no C++ compiler was found (g++ or c++), and nvcc needs one. Install it, e.g. apt install g++"
    "$1" -c 'import os, sysconfig as s; os.stat(os.path.join(s.get_paths()["include"], "Python.h"))' 2>/dev/null ||
        die "Python.h was not found, and flash-attn needs it. Install it, e.g. apt install" \
            "python$(python_version "$1")-dev. $otherwise"
    if [ -z "${FLASH_ATTN_CUDA_ARCHS:-}" ]; then
        architectures=$(gpu_architectures) || true
        case $architectures in
            *none:*) die "a GPU here has compute capability ${architectures##*none:}.x, and flash-attn needs 8, 9, 10 or 12." \
                "Set FLASH_ATTN_CUDA_ARCHS for the others. $otherwise" ;;
            "") say "warning: nvidia-smi reports no compute capability; flash-attn is compiled for 80, 90, 100 and 120" ;;
            *) export FLASH_ATTN_CUDA_ARCHS=$architectures ;;
        esac
    fi
    # A compiler takes up to 5.3 GB (pytorch pull 130443; flash-attention pull 2079 says 3 to 5): 6 for each job, which
    # compiles for one architecture at a time. A container's limit is not in /proc/meminfo.
    memory_gb=$(awk '/^MemAvailable/ {print int($2 / 1000 / 1000)}' /proc/meminfo)
    memory_gb=$(within_groups "$memory_gb")
    if [ -z "${MAX_JOBS:-}" ]; then
        MAX_JOBS=$((memory_gb / 6))
        [ "$MAX_JOBS" -le "$(nproc)" ] || MAX_JOBS=$(nproc)
        [ "$MAX_JOBS" -ge 1 ] || MAX_JOBS=1
        export NVCC_THREADS=${NVCC_THREADS:-1}
    fi
    export MAX_JOBS
    [ "$memory_gb" -ge 6 ] || say "warning: $memory_gb GB are free; each job that compiles flash-attn takes up to 6"
    say "flash-attn will be compiled by CUDA $release for ${FLASH_ATTN_CUDA_ARCHS:-all architectures}, $MAX_JOBS job(s) at a" \
        "time. Expect half an hour with 16 jobs for one architecture; its README says 3 to 5 minutes on 64 cores"
}

check_disk() {
    local need_gb=6 free_gb
    [ "$HARDWARE" = cpu ] || need_gb=30
    free_gb=$(df -Pk "$ROOT" | awk 'NR == 2 {print int($4 / 1024 / 1024)}')
    [ "$free_gb" -ge "$need_gb" ] ||
        die "$free_gb GB are free in $ROOT, but the $HARDWARE stack and a run need $need_gb GB." \
            "Free some, or clone elsewhere"
}

# ---- the state of .venv ---------------------------------------------------------------------------------------------

fingerprint() {
    echo "$HARDWARE"
    echo "$ROOT"
    "$VENV/bin/python" -V 2>&1
    cat "$LOCK" "$ROOT/setup.py" "$ROOT/pyproject.toml" | sha256sum
    [ "$HARDWARE" = cpu ] || echo "flash-attn $FLASH_ATTN"
}
is_ready() { [ -x "$VENV/bin/python" ] && [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; }

defect() { # prints what is wrong with .venv, nothing if it can be built on
    local version site dist_info
    version=$(python_version "$VENV/bin/python") || { echo "its Python does not run" && return; }
    is_supported "$version" || { echo "it has Python $version" && return; }
    "$VENV/bin/python" -m pip --version >/dev/null 2>&1 || { echo "its pip does not run" && return; }
    [[ $(<"$VENV/bin/activate") == *"$VENV"* ]] || { echo "it was made for another folder" && return; }
    site=$VENV/lib/python$version/site-packages
    # pip writes INSTALLER last, and renames what it is about to remove to ~name.
    for dist_info in "$site"/*.dist-info; do
        [ -f "$dist_info/INSTALLER" ] || { echo "${dist_info##*/} is half installed" && return; }
    done
    ! compgen -G "$site/~*" >/dev/null || echo "an upgrade in it was interrupted"
}

# ---- installing -----------------------------------------------------------------------------------------------------

show_progress() { # pip's output, for $1 packages -> a counter; a line every 40 packages if this is no terminal
    local total=$1 count=0 line name
    while IFS= read -r line; do
        case $line in
            Collecting\ * | Processing\ * | Requirement\ already\ satisfied:\ *)
                count=$((count + 1))
                name=${line#Requirement already satisfied: }
                name=${name#Collecting }
                name=${name#Processing }
                name=${name%% *}
                if [ -t 1 ]; then
                    printf '\r[setup]   %3d/%d %-48.48s' "$count" "$total" "${name##*/}"
                elif [ $((count % 40)) = 0 ]; then
                    say "  $count/$total"
                fi
                ;;
            "Installing collected packages: "*)
                [ ! -t 1 ] || printf '\r%80s\r' ""
                [ "$total" = 1 ] || say "  unpacking and compiling to bytecode (half of the time)"
                ;;
        esac
    done
    [ ! -t 1 ] || printf '\r%80s\r' ""
}

tell_uv() { # pip's indexes, links and certificate, which uv does not read itself
    local line key each no_index=""
    while IFS= read -r line; do # the environment's first
        key=${line%%=*}
        line=${line#*=}
        line=${line//\\n/ } # pip prints a value of several lines as '\nfirst\nsecond'
        for each in ${line//\'/}; do
            case ${key##*.} in
                cert) export SSL_CERT_FILE=${SSL_CERT_FILE:-$each} ;;
                index-url) export UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$each} ;;
                extra-index-url) UV_OPTIONS+=("--index=$each") ;;
                find-links) UV_OPTIONS+=("--find-links=$each") ;;
                trusted-host) UV_OPTIONS+=("--allow-insecure-host=$each") ;;
                no-index) no_index=${no_index:-$each} ;;
            esac
        done
    done < <("$VENV/bin/python" -m pip config list)
    case ${no_index,,} in 1 | t | true | y | yes | on) UV_OPTIONS+=(--no-index) ;; esac # uv takes it once only
}

install() { # $1: number of packages; the rest: arguments of pip install
    local total=$1
    shift
    set -- --no-deps --no-build-isolation "$@"
    echo "+ ${UV:-pip} install $*" >>"$LOG"
    if [ -z "$UV" ]; then
        "$VENV/bin/python" -m pip install "$@" 2>&1 | tee -a "$LOG" | show_progress "$total"
        return
    fi
    "$UV" pip install --python "$VENV/bin/python" --compile-bytecode "${UV_OPTIONS[@]}" "$@" 2>&1 |
        tee -a "$LOG" | grep -v '^ [-+~]' | sed 's/^/[setup]   /' || return "${PIPESTATUS[0]}"
}

pins() { # of the lock, with their hashes: all but torch and flash-attn, or those of package $1
    local wanted=${1:-}
    awk -v wanted="$wanted" '
        /^[a-zA-Z]/ { split($0, part, "=="); name = part[1]; of = wanted == "" ? name !~ /^(torch|flash-attn)$/ : name == wanted }
        of && !/^ *#/' "$LOCK" >"$VENV/pins.txt"
    echo "$VENV/pins.txt"
}

fail_with_log() {
    printf '[setup] ---- last lines of %s\n' "$LOG" >&2
    grep -v '^WARNING: Location' "$LOG" | tail -n 20 >&2
    die "$* Then run the same command again: it continues from here"
}

install_torch() {
    local pin
    pin=$(grep -oE '^torch==[^ ]+' "$LOCK")
    # The CPU build is not on PyPI: take it from pip's configured indexes, else from PyTorch's own index.
    install 1 "$pin" && return
    case $pin in *+cpu) ;; *) return 1 ;; esac
    say "  not in pip's configured indexes, trying $TORCH_CPU_INDEX"
    install 1 "$pin" --extra-index-url "$TORCH_CPU_INDEX"
}

install_all() {
    local reason python lines
    if [ -e "$VENV" ]; then
        reason=$(defect)
        if [ -n "$reason" ]; then
            say "the existing .venv is unusable ($reason): making it again"
            rm -rf "$VENV"
        fi
    fi
    if [ ! -e "$VENV" ]; then
        check_disk
        python=$(find_python)
        say "1/4 making .venv with Python $(python_version "$python") ($python)"
        "$python" -m venv "$VENV" || die "$python -m venv $VENV failed, see above"
    else
        say "1/4 updating the existing .venv"
    fi
    [ "$HARDWARE" = cpu ] || check_flash_attn "$VENV/bin/python"
    rm -f "$STAMP"
    : >"$LOG"
    if [ -z "$UV" ] && install 1 --require-hashes -r "$(pins uv)"; then
        UV=$VENV/bin/uv
    fi
    tell_uv

    say "2/4 installing torch ($HARDWARE)"
    install 1 --require-hashes -r "$(pins setuptools)" || fail_with_log "setuptools could not be installed."
    install_torch ||
        fail_with_log "torch could not be installed. Check the network (and pip's configuration: pip config list)."

    lines=$(grep -cE '^[a-zA-Z]' "$LOCK")
    say "3/4 installing the other $((lines - 2)) packages of ${LOCK#"$ROOT"/}"
    # Packages that compile against torch need all the others first.
    install "$lines" --require-hashes -r "$(pins)" || fail_with_log "A package could not be installed."
    if [ "$HARDWARE" = gpu ] && [ "$FLASH_ATTN" = 0 ]; then
        say "  without flash-attn: add +hardware=no_flash_attn to a run (SFT: +hardware=no_flash_attn_sft)"
    elif grep -q '^flash-attn==' "$LOCK"; then
        if [ "$FLASH_ATTN" = 1 ]; then set -- --require-hashes -r "$(pins flash-attn)"; else set -- "$FLASH_ATTN"; fi
        say "  flash-attn, from ${FLASH_ATTN/#1/its source}"
        # its build asks for `ninja` on PATH, which the lock has brought
        PATH=$VENV/bin:$PATH install 1 "$@" ||
            fail_with_log "flash-attn could not be built. RETOOL_FLASH_ATTN=0 continues without it (slower, see --help)."
    fi

    say "4/4 linking this checkout"
    install 1 -e "$ROOT" || fail_with_log "This package could not be linked."
    fingerprint >"$STAMP"
    say "done in $SECONDS s, $(du -sm "$VENV" | cut -f1) MB; log: .venv/install.log"
}

case ${1:-} in
    "" | --check) ;;
    -h | --help)
        usage
        exit
        ;;
    *)
        die "unknown argument '$1'; see --help"
        ;;
esac

HARDWARE=$(hardware)
LOCK=$ROOT/requirements/$HARDWARE.txt
FLASH_ATTN=${RETOOL_FLASH_ATTN:-$(sed -n 's/^flash-attn //p' "$STAMP" 2>/dev/null || true)}
FLASH_ATTN=${FLASH_ATTN:-1}
UV=$(command -v uv || true)
UV_OPTIONS=(--index-strategy=unsafe-best-match) # as pip
check_machine
if [ "${1:-}" = --check ]; then
    check_disk
    python=$(find_python)
    [ "$HARDWARE" = cpu ] || check_flash_attn "$python"
    say "ok: $HARDWARE stack, $python (Python $(python_version "$python")), $(uname -sm)"
    exit
fi
if ! is_ready; then
    # One installer at a time: the lock is on the folder itself and ends with this process.
    exec 9<"$ROOT/requirements"
    if command -v flock >/dev/null && ! flock --nonblock 9; then
        say "another install into this checkout is running; waiting for it"
        flock 9
    fi
    if ! is_ready; then
        install_all
    fi
fi
say ".venv is ready ($HARDWARE, $("$VENV/bin/python" -V))"
