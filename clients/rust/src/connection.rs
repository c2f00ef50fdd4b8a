//! How servers are reached: channels with their settings, and the choice among several servers.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;
use tonic::metadata::{Ascii, MetadataKey, MetadataMap, MetadataValue};
use tonic::service::Interceptor;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};
use tonic::{Code, Status};
use tonic_health::pb::health_client::HealthClient;
use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus};

use crate::Error;

pub(crate) const READINESS_SERVICE: &str = "mlxstream.v1.GenerationService";
pub(crate) const MESSAGE_LIMIT_BYTES: usize = 64 << 20;
const RECONNECT_PAUSE: Duration = Duration::from_millis(500);

/// What the generated stubs run on.
pub type Transport = InterceptedService<Channel, Headers>;

/// TLS: all is optional; without authorities the system's are trusted. Contents of PEM files, not their paths.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// Who may have signed the server's certificate.
    pub authorities: Option<Vec<u8>>,
    /// This client's own certificate and its key, where the server asks for one (mTLS).
    pub identity: Option<(Vec<u8>, Vec<u8>)>,
    /// The name that the server's certificate must have, in place of the target's host.
    pub server_name: Option<String>,
}

impl Tls {
    fn config(&self) -> ClientTlsConfig {
        let mut config = match &self.authorities {
            Some(authorities) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authorities)),
            None => ClientTlsConfig::new().with_native_roots(),
        };
        if let Some((certificate, key)) = &self.identity {
            config = config.identity(Identity::from_pem(certificate, key));
        }
        match &self.server_name {
            Some(name) => config.domain_name(name),
            None => config,
        }
    }
}

/// Puts the deadline and the client's own metadata on every call.
#[derive(Clone, Debug)]
pub struct Headers {
    pub(crate) metadata: MetadataMap,
    pub(crate) deadline: Option<Instant>,
}

impl Interceptor for Headers {
    fn call(&mut self, mut request: tonic::Request<()>) -> Result<tonic::Request<()>, Status> {
        let mut headers = std::mem::take(request.metadata_mut()).into_headers();
        headers.extend(self.metadata.clone().into_headers());
        *request.metadata_mut() = MetadataMap::from_headers(headers);
        if let Some(deadline) = self.deadline {
            request.set_timeout(deadline.saturating_duration_since(Instant::now()));
        }
        Ok(request)
    }
}

/// Add a value to metadata, if it can be one.
pub(crate) fn add_metadata(metadata: &mut MetadataMap, name: &str, value: &str) -> Result<(), Error> {
    let refused = |what| {
        Error::invalid_setting(format!("the {what} of the metadata {name:?} holds characters that cannot be sent"))
    };
    let key: MetadataKey<Ascii> = name.parse().map_err(|_| refused("name"))?;
    let value: MetadataValue<Ascii> = value.parse().map_err(|_| refused("value"))?;
    metadata.insert(key, value);
    Ok(())
}

/// One server. Its channel is made by the first call, which is inside a runtime.
#[derive(Debug)]
struct Server {
    endpoint: Endpoint,
    channel: OnceLock<Channel>,
}

impl Server {
    fn new(target: &str, tls: Option<&Tls>) -> Result<Self, Error> {
        let refused = || Error::invalid_setting(format!("the target must be HOST:PORT or unix:PATH, not {target:?}"));
        let is_socket = target.starts_with("unix:");
        let has_port = target
            .rsplit_once(':')
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0));
        if !is_socket && (!has_port || target.contains(['/', ' '])) {
            return Err(refused());
        }
        let scheme = if tls.is_some() { "https" } else { "http" };
        let address = if is_socket { target.to_owned() } else { format!("{scheme}://{target}") };
        let mut endpoint = Endpoint::from_shared(address)
            .map_err(|_| refused())?
            // Pings every 30 s are what the server expects; 20 s for the answer survive a busy machine.
            .http2_keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(20));
        if let Some(tls) = tls {
            endpoint = endpoint
                .tls_config(tls.config())
                .map_err(|error| Error::invalid_setting(format!("the TLS settings cannot be used: {error}")))?;
        }
        Ok(Self { endpoint, channel: OnceLock::new() })
    }

    fn channel(&self) -> Channel {
        self.channel.get_or_init(|| self.endpoint.connect_lazy()).clone()
    }

    /// Follow its health for ever, and tell whether it serves. A server without health is taken to.
    async fn follow(&self, tell: impl Fn(bool)) {
        loop {
            let followed = async {
                let request = HealthCheckRequest { service: READINESS_SERVICE.to_owned() };
                let mut statuses = HealthClient::new(self.channel()).watch(request).await?.into_inner();
                while let Some(health) = statuses.message().await? {
                    tell(health.status() == ServingStatus::Serving);
                }
                Ok::<_, Status>(())
            };
            tell(followed.await.is_err_and(|status| status.code() == Code::Unimplemented));
            tokio::time::sleep(RECONNECT_PAUSE).await;
        }
    }
}

/// One server, or several that take turns while their health says that they serve.
#[derive(Debug)]
pub(crate) struct Servers {
    servers: Vec<Arc<Server>>,
    health: OnceLock<Health>,
    turn: AtomicUsize,
}

/// Whether each server serves; None before it has told. Following ends with this value.
#[derive(Debug)]
struct Health {
    is_serving: watch::Receiver<Vec<Option<bool>>>,
    _following: JoinSet<()>,
}

impl Health {
    fn follow(servers: &[Arc<Server>]) -> Self {
        let (sender, is_serving) = watch::channel(vec![None; servers.len()]);
        let mut following = JoinSet::new();
        for (place, server) in servers.iter().cloned().enumerate() {
            let sender = sender.clone();
            following.spawn(async move {
                server.follow(|serves| sender.send_modify(|all| all[place] = Some(serves))).await
            });
        }
        Self { is_serving, _following: following }
    }
}

impl Servers {
    pub(crate) fn new(targets: &[String], tls: Option<&Tls>) -> Result<Self, Error> {
        if targets.is_empty() {
            return Err(Error::invalid_setting("there must be at least one target".to_owned()));
        }
        let servers = targets.iter().map(|target| Server::new(target, tls).map(Arc::new)).collect::<Result<_, _>>()?;
        Ok(Self { servers, health: OnceLock::new(), turn: AtomicUsize::new(0) })
    }

    pub(crate) fn count(&self) -> usize {
        self.servers.len()
    }

    pub(crate) fn channel(&self, server: usize) -> Channel {
        self.servers[server].channel()
    }

    /// Whose turn it is. With several, waits until one is known to serve, or until none is; then any may refuse.
    pub(crate) async fn next(&self) -> usize {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        if self.count() == 1 {
            return 0;
        }
        let mut is_serving = self.health.get_or_init(|| Health::follow(&self.servers)).is_serving.clone();
        let is_known = |states: &Vec<Option<bool>>| states.contains(&Some(true)) || !states.contains(&None);
        let states = is_serving.wait_for(is_known).await.map(|states| states.clone()).unwrap_or_default();
        let serving: Vec<_> = (0..self.count()).filter(|server| states.get(*server) == Some(&Some(true))).collect();
        match serving.as_slice() {
            [] => turn % self.count(),
            some => some[turn % some.len()],
        }
    }
}
