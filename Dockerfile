# The command `redisacc`, for the services of docker-compose.yml. This image does not contain a server.

FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY lua lua
COPY _redisacc_command.py ./
COPY redisacc redisacc
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/redisacc-*.whl)[serve]" \
    && useradd --create-home --uid 10001 redisacc
USER redisacc
WORKDIR /home/redisacc
# Python writes progress without buffering, so that `docker-compose logs` shows it at once.
ENV PYTHONUNBUFFERED=1
ENTRYPOINT ["redisacc"]
CMD ["--help"]
