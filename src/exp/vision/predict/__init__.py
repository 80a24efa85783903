"""What task=predict does, one module for each kind of data: ``predict(session, data, model) -> metrics, files``."""
