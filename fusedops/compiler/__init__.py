"""From a Dynamo graph to one that calls fusedops operators: normalise, match, rewrite, report."""
