"""Settings by section, with the rules that belong to them, from files and overrides."""
