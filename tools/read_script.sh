# Read by megatron_command.py before the text of a training script, in a restricted bash: what would start a program is noted on
# descriptor 3, word by word with zero bytes between, and ends in the byte 1; what would end the shell, or wait, does nothing.
exit() { (( ++_exits > 9 )) && builtin exit; return 0; }
kill() { return 0; }
sbatch() { local text; read -r -d '' text; eval "$text"; }
dirname() { [[ $1 == */* ]] && echo "${1%/*}" || echo .; }
seq() { local i=1; (( $# > 1 )) && i=$1; for (( ; i <= ${!#}; i++ )); do echo $i; done; }
command_not_found_handle() {
    for _name in ${!MIMO_@}; do printf '%s\0' "$_name=${!_name}" >&3; done
    printf '%s\0' "$@" $'\x01' >&3
    [[ ${!#} == ?(*/)?(ba)sh ]] && sbatch
    return 0
}
