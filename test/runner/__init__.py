"""The runner of the registered tests: it finds, places, balances and runs every test file.

    discovery   which files there are, and what each states about itself (read, never imported)
    selection   hardware, suite, partition
    reach       which test files a change can reach, by the import graph
    schedule    which files run side by side, on which GPUs
    process     one file in one pytest process, killed with all it started when it hangs
    results     counts, skips and their reasons, JUnit
    main        the command line and what is printed

It needs nothing but pytest and the standard library, so that it runs on machines where nothing can be installed.
"""
