# Sourced by the launchers in this folder: goes to the repository's root, finds Python, sorts arguments, checks inputs.
# Paths in variables count from the repository's root, unless absolute.
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

if [[ ${1-} == --help ]]; then # the launcher's own header; Hydra's help is `--hydra-help`
  sed -n '2,/^[^#]/s/^# \{0,1\}//p' "recipe/retool/$(basename "$0")"
  exit 0
fi

if [[ -z ${PYTHON-} ]]; then
  if [[ -x .venv/bin/python ]]; then PYTHON=$PWD/.venv/bin/python; else PYTHON=python; fi
fi
export VERL_USE_EXTERNAL_MODULES=verl_ext

# Hydra wants its options (`--cfg job`) in front of all overrides (`key=value`, `~key`), and the launchers add overrides.
OPTIONS=() OVERRIDES=() PRINT_ONLY=false
for arg in "$@"; do
  case $arg in
    --cfg | --cfg=* | -c | --info | --info=* | -i | --hydra-help) OPTIONS+=("$arg") PRINT_ONLY=true ;;
    -*) OPTIONS+=("$arg") ;;
    *=* | ~*) OVERRIDES+=("$arg") ;;
    *) OPTIONS+=("$arg") ;; # the value of the option before it
  esac
done

# require NAME KEY HINT: the path in variable NAME exists, unless the command line overrides KEY or Hydra only prints.
require() {
  local override
  if $PRINT_ONLY || [[ -e ${!1} ]]; then return; fi
  for override in "${OVERRIDES[@]}"; do
    if [[ $override == "$2="* ]]; then return; fi
  done
  echo "$(basename "$0"): $1=${!1} does not exist. $3" >&2
  exit 1
}
