"""Built-in and user-defined recipes: model, data, loss, optimizer, schedule."""
