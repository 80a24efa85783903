"""The models, one subpackage each. Importing this package imports none of them."""
