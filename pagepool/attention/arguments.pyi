from typing import final

__all__: list[str]

@final
class Arguments: ...
