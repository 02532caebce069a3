# Builds the library, tests it, and serves the requests of examples/serve:
#   docker build -t tandem . && docker run --rm tandem
FROM debian:12
RUN apt-get update && apt-get install -y --no-install-recommends ca-certificates git make python3
COPY . /tandem
WORKDIR /tandem
RUN make check
RUN cmake --preset release && cmake --build build/release --target tandem tandem_cli \
  && cmake --install build/release --prefix /opt/tandem
RUN cmake -S examples/serve -B build/serve -G Ninja -D CMAKE_PREFIX_PATH=/opt/tandem && cmake --build build/serve
CMD ["build/serve/serve"]
