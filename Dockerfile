# The environment of `make test`, `make all` and the pods of profiles/kubernetes, PyTorch for the CPU:
#   docker build -t stppo .
#   docker run --rm stppo                                          tests
#   docker run --rm -v "$PWD/results:/stppo/results" stppo make all
FROM python:3.11-slim-bookworm

# Debian's own releases of these serve; their pins would leave its mirrors with the next one.
# git: runs record their commit; g++: small policies are computed by compiled C++
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --no-install-recommends --yes g++ git make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /stppo
ENV PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu PIP_NO_CACHE_DIR=1
COPY . .
RUN make setup
# Pods find `python` and `pip` by name, and storage and checkpoints in S3 by these plug-ins, for which S3's own
# library wants an older python-dateutil than the lock has.
ENV PATH=/stppo/.venv/bin:$PATH
RUN pip install --quiet -e '.[kubernetes]'
CMD ["make", "test"]
