"""What the tests of the whole system share: processes, clients, models, references."""
