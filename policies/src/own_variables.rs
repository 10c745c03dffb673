//! Variables of our environment that are meant for us: no program that we start inherits them.
//!
//! | variable | what a child would do with it |
//! |---|---|
//! | `NOTIFY_SOCKET`, `WATCHDOG_*`, `LISTEN_*` | speak to the service manager in our name, as tools for containers do |
//! | `CREDENTIALS_DIRECTORY` | read the keys that the service manager handed to us |
//! | `OTEL_EXPORTER_OTLP*` | hold the key of our collector, and send to it |
//! | `LLAMA_WARDEN_SECTION__KEY`, `LLAMA_WARDEN_CONFIG` and the like | hold secrets of other models (`…__ENV__HF_TOKEN`) |
//!
//! A variable that a model's `env` names is the child's own and stays. So do names that patches read in llama-server: they begin as ours
//! do and have no two underscores (`LLAMA_WARDEN_GRAPH_CACHE_CAP`).

/// Set for us by a service manager or by the program before us.
const HANDED_TO_US: [&str; 8] = [
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
    "LISTEN_FDS",
    "LISTEN_FDNAMES",
    "LISTEN_PID",
    "CREDENTIALS_DIRECTORY",
    "WARDEN_SUCCEEDS",
];
/// Our own that are no path of the configuration.
const CONFIGURATION: [&str; 2] = ["LLAMA_WARDEN_CONFIG", "LLAMA_WARDEN_ADMIN_SOCKET"];

/// Whether a variable of ours is kept from the programs that we start.
pub fn is_ours_alone(name: &str) -> bool {
    HANDED_TO_US.contains(&name)
        || CONFIGURATION.contains(&name)
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
            assert!(is_ours_alone(name), "{name}");
        }
        for name in [
            "PATH",
            "HF_TOKEN",
            "LLAMA_API_KEY",
            "LLAMA_WARDEN_GRAPH_CACHE_CAP",
            "OTEL_SERVICE_NAME",
            "XDG_RUNTIME_DIR",
        ] {
            assert!(!is_ours_alone(name), "{name}");
        }
    }
}
