"""Launchers start processes, watch them and end them; what runs there is not their affair."""
