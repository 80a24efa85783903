"""Reports on any set of run folders: tables and one HTML page. Imports no torch, so it runs on any machine."""
