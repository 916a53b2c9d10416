"""Train steps for benchmarks: of other libraries, of published models, and small ones of one idea each."""
