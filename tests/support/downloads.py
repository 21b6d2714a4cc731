"""Replacement for the downloads of pretrained weights."""


def serve(monkeypatch, answer):
    """Let torchvision's downloads return a state dict, or raise an error."""

    def fetch(url, **options):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
