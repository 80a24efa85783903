"""The configuration: its typed schema, and the checks that span several keys. Imports no torch."""
