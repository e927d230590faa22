# lora-merge on CPUs, installed from its wheel:
#   docker build -t lora-merge .
#   docker run --rm -v "$PWD:/data" lora-merge base.safetensors style.safetensors:0.8
FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[plots]"
RUN useradd --create-home merger
USER merger
WORKDIR /data
ENTRYPOINT ["lora-merge"]
CMD ["--help"]
