# The command, with all that its options need:
#   docker build -t paddle-reshard .
#   docker run --rm -v "$PWD:/data" paddle-reshard inspect /data/checkpoint-1000
# For the pods of a Ray cluster, whose images must be Ray's own:
#   docker build -t paddle-reshard-ray --build-arg BASE=rayproject/ray:2.60.0-py312 .
ARG BASE=python:3.12-slim

FROM python:3.12-slim AS build
COPY . /source
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /source

FROM ${BASE}
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(ls /wheels/*.whl)[all]"
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["paddle-reshard"]
CMD ["--help"]
