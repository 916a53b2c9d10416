"""The search for a plan: best-first over sets of plans, with a counted budget of work.

In: a traced step and a request. Out: the best plan found, not written yet, with the proven lower bound over everything
that was not searched, the work spent, and the candidates that were not reached.

    best_first          the loop: candidates with a proven bound, which prunes, an estimate, which orders, and work
    configs             micro-batches and rematerialisation of one mesh; which configuration only adds to which
    one_mesh            candidates of one mesh: configurations, the program of each mesh shape, textbook methods
    pipeline_analysis   costs of layers, and planned pipelines
    pipelines           candidates of pipelines: numbers of micro-batches, stages, and slices of the sequence
    planner             which candidates a request begins with, and the program of the best plan

A plan is a function of step, request and versions of libraries: no clock, load, number of cores or hash decides.
"""
