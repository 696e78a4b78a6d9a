"""Starting the ranks of a job: `omnireduce run` and `omnireduce.run`.

On each host one process starts, a supervisor (`supervisor`). On the launcher's own host it is a child, on other hosts
`ssh` starts it. Both exchange messages (`connection`) over standard input and output. A supervisor starts ranks, each
in a separate session, and reports their output and their ends. It ends them when its standard input closes. So no
process is left behind if the launcher ends by an order, a signal, SIGKILL, or a broken connection. If a supervisor
itself is killed, the system kills the ranks (PR_SET_PDEATHSIG).

    hosts            hosts, and the place of each rank on them
    environment      the environment variables of a rank, with the secret of the job
    plan             the aggregators of the job, from the command line and the configuration together
    connection       a supervisor, as the launcher sees it
    loop, job        the launcher's loop: starts, output, signals, the first failure, the end
    launch           a launch from its first process to its exit status
    elastic_job      a job in which ranks are started again; `elastic` has its flags
    output           lines with prefixes
    other_launchers  mpirun, srun and torchrun in place of supervisors; `set_rank` runs inside them
    command          the command line; `flags` has the names that users of Horovod know
    functions        functions in place of commands; `function_rank` is their side of a rank
"""
