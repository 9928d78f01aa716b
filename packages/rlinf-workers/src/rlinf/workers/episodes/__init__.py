"""Episodes: several turns of a model, with what tools answered between them. No engine here."""
