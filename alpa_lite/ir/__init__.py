"""Values of the compiler: graphs, layouts, strategies, programs and schedules, without passes and devices."""
