"""A trained model behind HTTP: OpenAI's API, a page to chat, health and metrics. It needs the extra `serve`.

`http_server.run` listens; `app.make_app` is the ASGI application; `engine_thread.EngineThread` drives the engine.
"""
