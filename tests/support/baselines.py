"""The config files, and the rows of the benchmark table of the 2021 distribuuuu."""

from support.runs import ROOT

# The overlays of speed are not runs.
FILES = sorted(path for path in (ROOT / "configs").rglob("*.yaml") if path.parent.name != "speed")

# Config name: arch, parameters in M, global batch, base LR, weight decay, GPUs, and the reported top-1 and top-5.
BASELINES = {
    "resnet18": ("resnet18", "11.690", 256, 0.2, 5e-5, 8, "70.902", "89.894"),
    "resnet18_bs1024": ("resnet18", "11.690", 1024, 0.8, 5e-5, 8, "70.994", "89.892"),
    "resnet18_bs8192": ("resnet18", "11.690", 8192, 6.4, 5e-5, 64, "70.165", "89.374"),
    "resnet18_bs16384": ("resnet18", "11.690", 16384, 12.8, 5e-5, 64, "68.766", "88.381"),
    "efficientnet_b0": ("efficientnet_b0", "5.289", 512, 0.4, 1e-5, 8, "74.540", "91.744"),
    "resnet50": ("resnet50", "25.557", 256, 0.2, 5e-5, 8, "77.252", "93.430"),
    "botnet50": ("botnet50", "20.859", 256, 0.2, 5e-5, 8, "77.604", "93.682"),
    "regnetx_160": ("regnetx_160", "54.279", 512, 0.4, 5e-5, 8, "79.992", "95.118"),
    "regnety_160": ("regnety_160", "83.590", 512, 0.4, 5e-5, 8, "80.598", "95.090"),
    "regnety_320": ("regnety_320", "145.047", 512, 0.4, 5e-5, 8, "80.824", "95.276"),
}
