//! Finds optional tools and libraries: npm for the web page, OpenSSL or libcurl for HTTPS.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::found::BuildCompilers;
use super::missing_if_failed;
use crate::builder::Builder;
use crate::environment::BuildEnvironment;
use crate::error::Result;

/// Program that prints its OpenSSL version, and needs both OpenSSL libraries.
const OPENSSL_PROGRAM: &str = "#include <openssl/ssl.h>\n#include <openssl/opensslv.h>\n#include <stdio.h>\n\
    int main(void) { return SSL_CTX_new(TLS_client_method()) == NULL || puts(OPENSSL_VERSION_TEXT) < 0; }\n";

/// Program that prints its libcurl version, and fails if the libcurl at run time does not support HTTPS.
const CURL_PROGRAM: &str = "#include <curl/curl.h>\n#include <stdio.h>\n\
    int main(void) { return !(curl_version_info(CURLVERSION_NOW)->features & CURL_VERSION_SSL)\
    || puts(\"libcurl \" LIBCURL_VERSION) < 0; }\n";

/// Versions of npm and node, such as `npm 10.8.2, node v22.1.0`; `None` if one of them does not run.
pub(crate) async fn find_npm(builder: &Builder) -> Result<Option<String>> {
    let env = &builder.env;
    let (Some(npm), Some(node)) = (env.find("npm"), env.find("node")) else { return Ok(None) };
    let version = async |program: &Path| {
        builder.program_output(program, &["--version"], "asking for its version").await
    };
    let versions = missing_if_failed(tokio::try_join!(version(&npm), version(&node)))?;
    Ok(versions.map(|(npm, node)| format!("npm {}, node {}", npm.trim(), node.trim())))
}

/// The compiler's OpenSSL, shortened to `OpenSSL 3.0`; `None` if no program with it compiles and runs.
pub(crate) async fn find_openssl(builder: &Builder, compilers: &BuildCompilers) -> Result<Option<String>> {
    let libraries = ["-lssl", "-lcrypto"];
    run_linked_program(builder, compilers, OPENSSL_PROGRAM, &libraries, "looking for OpenSSL").await
}

/// Version of the compiler's libcurl with HTTPS; `None` as in [`find_openssl`]. Ignores `CPATH` and the like:
/// cmake does not search these folders, and would fail if libcurl were only there.
pub(crate) async fn find_curl(builder: &Builder, compilers: &BuildCompilers) -> Result<Option<String>> {
    let env = BuildEnvironment { searched: BTreeMap::new(), ..builder.env.clone() };
    let builder = Builder { env, ..builder.clone() };
    run_linked_program(&builder, compilers, CURL_PROGRAM, &["-lcurl"], "looking for libcurl").await
}

/// The version printed by a program with these libraries, if it compiles and runs.
async fn run_linked_program(
    builder: &Builder,
    compilers: &BuildCompilers,
    text: &str,
    libraries: &[&str],
    doing: &str,
) -> Result<Option<String>> {
    let private = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    let Ok(folder) = tempfile::Builder::new().permissions(private).tempdir() else { return Ok(None) };
    let (source, program) = (folder.path().join("x.c"), folder.path().join("x"));
    if fs::write(&source, text).is_err() {
        return Ok(None);
    }
    let (from, to) = (source.to_string_lossy(), program.to_string_lossy());
    let arguments = [&[&*from, "-o", &*to], libraries].concat();
    let made = builder.program_output(&compilers.c.path, &arguments, doing).await;
    if missing_if_failed(made)?.is_none() || !program.exists() {
        return Ok(None);
    }
    let text = missing_if_failed(builder.program_output(&program, &[], "asking for its version").await)?;
    Ok(text.as_deref().and_then(shorten_version))
}

/// Shortens `OpenSSL 3.0.17 1 Jul 2025` to `OpenSSL 3.0`: the rest may change without a new build.
fn shorten_version(text: &str) -> Option<String> {
    let mut words = text.split_whitespace();
    let (name, number) = (words.next()?, words.next()?);
    let mut parts = number.split('.');
    Some(format!("{name} {}.{}", parts.next()?, parts.next()?))
}

#[cfg(test)]
mod tests {
    use super::shorten_version;

    #[test]
    fn a_version_is_kept_as_far_as_programs_depend_on_it() {
        assert_eq!(shorten_version("OpenSSL 3.0.17 1 Jul 2025").as_deref(), Some("OpenSSL 3.0"));
        assert_eq!(shorten_version("LibreSSL 4.1.0").as_deref(), Some("LibreSSL 4.1"));
        assert_eq!(shorten_version("libcurl 7.88.1").as_deref(), Some("libcurl 7.88"));
        assert_eq!(shorten_version("x"), None);
    }
}
