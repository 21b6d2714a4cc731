"""Downloads that are answered on this machine."""


def serve(monkeypatch, answer):
    """Answer torchvision's downloads with a state dict, or with an error."""

    def fetch(url, **options):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetch)
