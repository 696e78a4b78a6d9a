"""Starting the ranks of a job: `omnireduce run` and `omnireduce.run`.

One process starts on each host, a supervisor (`supervisor`). On the launcher's own host it is a child, on others `ssh`
starts it. Both speak the same messages (`messages`) over standard input and output. A supervisor starts ranks, each
in a session of its own, and sends their output and their ends. It ends them when its standard input closes. So nothing
is left behind, whatever ends the launcher: an order, a signal, SIGKILL, or a connection that breaks. When a supervisor
is killed itself, the system kills the ranks (PR_SET_PDEATHSIG).

    hosts         which ranks run where
    environment   what a rank is told by its environment, the secret of the job included
    plan          who serves the job, and what the command line and the configuration say together
    connection    a supervisor, as the launcher sees it
    job           the launcher's loop: starts, output, signals, the first failure, the end
    elastic       the same for a job in which ranks are started again
    output        lines with prefixes
    others        mpirun, srun and torchrun in place of supervisors
    command       the command line; `flags` and `yaml_file` know the names that users of Horovod know
    calls         functions in place of commands
"""
