//! Environment variables that are meant only for llama-warden and that child processes do not inherit.
//!
//! | variable | effect if a child inherited it |
//! |---|---|
//! | `NOTIFY_SOCKET`, `WATCHDOG_*`, `LISTEN_*` | notifies the service manager as llama-warden |
//! | `CREDENTIALS_DIRECTORY` | exposes the keys passed by the service manager |
//! | `OTEL_EXPORTER_OTLP*` | exposes the collector's key, and sends to the collector |
//! | `LLAMA_WARDEN_SECTION__KEY` and the like | exposes secrets of other models (`…__ENV__HF_TOKEN`) |
//!
//! A variable set in a model's `env` is passed on, as are variables that our patches read in llama-server:
//! these have the same prefix, but no double underscore (`LLAMA_WARDEN_GRAPH_CACHE_CAP`).

/// Variables set for llama-warden by a service manager or by the llama-warden that it replaces.
const INHERITED_VARIABLES: [&str; 8] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LISTEN_PID",
    "CREDENTIALS_DIRECTORY",
    "WARDEN_SUCCEEDS",
];
const CONFIGURATION_VARIABLES: [&str; 2] = ["LLAMA_WARDEN_CONFIG", "LLAMA_WARDEN_ADMIN_SOCKET"];

/// Returns true if a variable is withheld from child processes.
pub fn is_own_variable(name: &str) -> bool {
    INHERITED_VARIABLES.contains(&name)
        || CONFIGURATION_VARIABLES.contains(&name)
        || name.starts_with("OTEL_EXPORTER_OTLP")
        || name.strip_prefix("LLAMA_WARDEN_").is_some_and(|rest| rest.contains("__"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_and_configuration_are_ours_alone_and_what_a_server_reads_is_not() {
        for name in [
            "NOTIFY_SOCKET",
            "LISTEN_FDS",
            "CREDENTIALS_DIRECTORY",
            "OTEL_EXPORTER_OTLP_HEADERS",
            "OTEL_EXPORTER_OTLP_TRACES_HEADERS",
            "OTEL_EXPORTER_OTLP_ENDPOINT",
            "LLAMA_WARDEN_SERVER__PORT",
            "LLAMA_WARDEN_MODELS__x__ENV__HF_TOKEN",
            "LLAMA_WARDEN_CONFIG",
        ] {
            assert!(is_own_variable(name), "{name}");
        }
        for name in [
            "PATH",
            "HF_TOKEN",
            "LLAMA_API_KEY",
            "LLAMA_WARDEN_GRAPH_CACHE_CAP",
            "OTEL_SERVICE_NAME",
            "XDG_RUNTIME_DIR",
        ] {
            assert!(!is_own_variable(name), "{name}");
        }
    }
}
