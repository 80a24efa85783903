"""Small real data sets, for the default run and the tests."""
