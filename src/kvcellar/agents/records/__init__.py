"""Records of agents: what is known and stored of one, its names, its views, its durable form.

Imports hosting's conversations and the store's types; no verb comes in.
"""
