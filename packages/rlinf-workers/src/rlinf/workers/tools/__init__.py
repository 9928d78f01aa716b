"""Tools that a model may call, how their calls are carried out, and the plug-ins among them."""
