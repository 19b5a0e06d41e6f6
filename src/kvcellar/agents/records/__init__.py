"""Records of agents: what is known and stored of one, its names, its views, its durable form.

Facts and their checks; what comes in is hosting's conversations and the store, and no verb.
"""
