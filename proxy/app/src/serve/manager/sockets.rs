//! Sockets that the service manager opened for the program (socket activation, `sd_listen_fds(3)`): clients
//! that connect wait there while the program starts or restarts.
//!
//! | name (`FileDescriptorName=`) | socket |
//! |---|---|
//! | `public`, or none | TCP sockets for clients, one for each address; replace `server.host` and `server.port` |
//! | `admin` | a Unix socket instead of `admin.socket`, or a TCP socket on loopback instead of `admin.address` |

use std::ffi::OsString;
use std::net::TcpListener;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use listenfd::ListenFd;
use rustix::net::sockopt::socket_acceptconn;

use crate::exit::CommandError;

/// The sockets handed over by the service manager; usually none.
#[derive(Debug, Default)]
pub(crate) struct ActivatedSockets {
    pub(crate) public: Vec<TcpListener>,
    /// Unix socket for the admin routes, with the path at which programs connect.
    pub(crate) admin: Option<(UnixListener, PathBuf)>,
    pub(crate) admin_tcp: Option<TcpListener>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SocketPurpose {
    Public,
    Admin,
}

impl ActivatedSockets {
    /// Takes the sockets and removes their variables. Must be called before there is a second thread.
    pub(crate) fn take() -> Result<Self, CommandError> {
        let text = |name: &str| std::env::var_os(name).unwrap_or_default();
        let count = socket_count(&text("LISTEN_FDS"), &text("LISTEN_PID"), std::process::id());
        let names = socket_names(&text("LISTEN_FDNAMES"), count)?;
        let mut given = if count == 0 { ListenFd::empty() } else { ListenFd::from_env() };
        let mut sockets = Self::default();
        for (index, (name, whose)) in names.into_iter().enumerate() {
            let shown =
                format!("the socket `{name}` that the service manager hands over (descriptor {})", 3 + index);
            sockets.add(&mut given, index, whose, &shown)?;
        }
        Ok(sockets)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.public.is_empty() && self.admin.is_none() && self.admin_tcp.is_none()
    }

    fn add(
        &mut self,
        given: &mut ListenFd,
        index: usize,
        whose: SocketPurpose,
        shown: &str,
    ) -> Result<(), CommandError> {
        let tcp = given.take_tcp_listener(index).ok().flatten();
        if let Some(socket) = tcp {
            check_listening(&socket, shown)?;
            match whose {
                SocketPurpose::Public => self.public.push(socket),
                SocketPurpose::Admin
                    if !socket.local_addr().is_ok_and(|address| address.ip().is_loopback()) =>
                {
                    let hint =
                        "the admin routes are for this machine: `ListenStream=127.0.0.1:9090`, or a path";
                    return Err(CommandError::usage(format!("{shown} can be reached from elsewhere"), hint));
                }
                SocketPurpose::Admin if self.admin_tcp.is_some() => return Err(duplicate_socket(shown)),
                SocketPurpose::Admin => self.admin_tcp = Some(socket),
            }
            return Ok(());
        }
        let unix = given.take_unix_listener(index).ok().flatten();
        let (Some(socket), SocketPurpose::Admin) = (unix, whose) else {
            let wanted = match whose {
                SocketPurpose::Public => "a TCP socket is needed for clients: `ListenStream=8080`",
                SocketPurpose::Admin => {
                    "a Unix socket or one on loopback is needed: `ListenStream=/run/llama-warden/admin.sock`"
                }
            };
            return Err(CommandError::usage(
                format!("{shown} is of a kind that cannot be used for that"),
                wanted,
            ));
        };
        check_listening(&socket, shown)?;
        let path = socket.local_addr().ok().and_then(|address| address.as_pathname().map(PathBuf::from));
        let Some(path) = path else {
            let hint = "`ListenStream=/run/llama-warden/admin.sock`: `llama-warden status` looks for a file";
            return Err(CommandError::usage(format!("{shown} has no path"), hint));
        };
        if self.admin.replace((socket, path)).is_some() { Err(duplicate_socket(shown)) } else { Ok(()) }
    }
}

fn duplicate_socket(shown: &str) -> CommandError {
    CommandError::usage(
        format!("{shown} is the second of its kind"),
        "one Unix socket and one TCP socket is all that `admin` may be",
    )
}

fn check_listening(socket: &impl AsFd, shown: &str) -> Result<(), CommandError> {
    match socket_acceptconn(socket) {
        Ok(false) => Err(CommandError::usage(
            format!("{shown} does not listen"),
            "`Accept=no` in the unit of the socket",
        )),
        // An old kernel does not report whether the socket listens; a later accept will show it.
        Ok(true) | Err(_) => Ok(()),
    }
}

/// Returns the number of sockets handed over to this process; 0 if they are meant for another process.
fn socket_count(count: &OsString, process: &OsString, own: u32) -> usize {
    if process.to_str().and_then(|text| text.parse().ok()) != Some(own) {
        return 0;
    }
    count.to_str().and_then(|text| text.parse().ok()).unwrap_or(0)
}

fn socket_names(written: &OsString, count: usize) -> Result<Vec<(String, SocketPurpose)>, CommandError> {
    let written = written.to_string_lossy();
    let mut all = written.split(':');
    let told = (0..count).map(|_| {
        let name = all.next().filter(|name| !name.is_empty()).unwrap_or("unknown");
        // A socket without a configured name has the name of its unit, or `unknown`.
        let whose = match name {
            "admin" => SocketPurpose::Admin,
            "public" | "unknown" => SocketPurpose::Public,
            unit if unit.ends_with(".socket") => SocketPurpose::Public,
            _ => {
                let hint =
                    "`FileDescriptorName=public` or `FileDescriptorName=admin` in the unit of the socket";
                return Err(CommandError::usage(
                    format!("nothing is known of a socket by the name of `{name}`"),
                    hint,
                ));
            }
        };
        Ok((name.to_owned(), whose))
    });
    told.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_of_another_process_are_not_ours() {
        let text = |text: &str| OsString::from(text);
        assert_eq!(socket_count(&text("2"), &text("7"), 7), 2);
        for (number, process) in [("2", "8"), ("2", ""), ("", "7"), ("-1", "7"), ("two", "7")] {
            assert_eq!(socket_count(&text(number), &text(process), 7), 0, "{number} of {process}");
        }
    }

    #[test]
    fn names_say_what_a_socket_is_for_and_one_that_says_nothing_is_told() {
        let whose = |text: &str, count| {
            socket_names(&OsString::from(text), count)
                .map(|all| all.into_iter().map(|(_, whose)| whose).collect::<Vec<_>>())
        };
        assert_eq!(whose("admin:public", 2).unwrap(), [SocketPurpose::Admin, SocketPurpose::Public]);
        assert_eq!(whose("", 2).unwrap(), [SocketPurpose::Public; 2]);
        assert_eq!(
            whose("llama-warden.socket:admin", 2).unwrap(),
            [SocketPurpose::Public, SocketPurpose::Admin]
        );
        let told = whose("public:metrics", 2).unwrap_err();
        assert!(told.to_string().contains("`metrics`") && told.code() == 2, "{told}");
    }
}
