package mlxstream

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // health checking of balanced connections
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	v1 "github.com/mlx-stream/mlx-stream/clients/go/v1"
)

// DefaultTimeout bounds every call whose context has no deadline of its own.
const DefaultTimeout = 600 * time.Second

// ReadinessService is the name under which health tells whether generations are taken.
const ReadinessService = "mlxstream.v1.GenerationService"

const (
	messageLimitBytes = 64 * 1024 * 1024
	// Pings every 30 s are what the server expects; 20 s for the answer survive a busy machine.
	keepaliveTime    = 30 * time.Second
	keepaliveTimeout = 20 * time.Second
	several          = "mlxstream-several"
)

type settings struct {
	timeout  time.Duration
	balanced bool
	token    string
	tls      *tls.Config
	dial     []grpc.DialOption
}

// Option changes how [Connect] connects.
type Option func(*settings) error

// WithTLS encrypts, and checks the server by config; nil means the system's authorities.
func WithTLS(config *tls.Config) Option {
	return func(s *settings) error {
		if config == nil {
			config = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		s.tls = config
		return nil
	}
}

// WithTLSFiles encrypts with PEM files: the authority that signed the server's certificate ("" means the system's), and
// for mTLS a certificate and its key ("" means none).
func WithTLSFiles(authority, certificate, key string) Option {
	return func(s *settings) error {
		config := &tls.Config{MinVersion: tls.VersionTLS12}
		if authority != "" {
			pem, err := os.ReadFile(authority)
			if err != nil {
				return err
			}
			config.RootCAs = x509.NewCertPool()
			if !config.RootCAs.AppendCertsFromPEM(pem) {
				return fmt.Errorf("mlxstream: %s holds no certificate", authority)
			}
		}
		if certificate != "" {
			pair, err := tls.LoadX509KeyPair(certificate, key)
			if err != nil {
				return err
			}
			config.Certificates = []tls.Certificate{pair}
		}
		s.tls = config
		return nil
	}
}

// WithToken presents a bearer token with every call.
func WithToken(token string) Option {
	return func(s *settings) error {
		if token == "" || strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
			return errors.New("mlxstream: a token is made of visible ASCII characters")
		}
		s.token = token
		return nil
	}
}

// WithTimeout bounds every call whose context has no deadline, in place of [DefaultTimeout]. 0 means no bound.
func WithTimeout(timeout time.Duration) Option {
	return func(s *settings) error {
		if timeout < 0 {
			return fmt.Errorf("mlxstream: the timeout must not be negative, got %v", timeout)
		}
		s.timeout = timeout
		return nil
	}
}

// WithBalancing sends calls by turns to every server behind the target whose health says that it serves, rather than
// all to one. Several targets, joined by commas, are balanced anyway.
func WithBalancing() Option {
	return func(s *settings) error { s.balanced = true; return nil }
}

// WithDialOptions passes options on to gRPC, such as interceptors.
func WithDialOptions(options ...grpc.DialOption) Option {
	return func(s *settings) error { s.dial = append(s.dial, options...); return nil }
}

// Client talks to one server, or to several that serve the same. It is safe for concurrent use.
type Client struct {
	conn        *grpc.ClientConn
	timeout     time.Duration
	generations v1.GenerationServiceClient
	models      v1.ModelServiceClient
	admin       v1.AdminServiceClient
	health      healthv1.HealthClient
	closed      atomic.Bool
	durable     sync.Map // of durable streams under way, and of those that were left, until the server was told: a parting
}

// Connect describes a connection: "HOST:PORT", "unix:PATH", several "HOST:PORT" joined by commas, or another target that
// gRPC knows. Nothing is sent before the first call. Call [Client.Close] at the end.
func Connect(target string, options ...Option) (*Client, error) {
	chosen := settings{timeout: DefaultTimeout}
	for _, option := range options {
		if err := option(&chosen); err != nil {
			return nil, err
		}
	}
	target, addresses, err := checkedTarget(target)
	if err != nil {
		return nil, err
	}
	conn, err := grpc.NewClient(target, dialOptions(chosen, addresses)...)
	if err != nil {
		return nil, err
	}
	client := &Client{conn: conn, timeout: chosen.timeout}
	stubs := unary{conn, client}
	client.generations = v1.NewGenerationServiceClient(stubs)
	client.models = v1.NewModelServiceClient(stubs)
	client.admin = v1.NewAdminServiceClient(stubs)
	client.health = healthv1.NewHealthClient(stubs)
	return client, nil
}

// Generations gives the stubs of the service that generates.
func (c *Client) Generations() v1.GenerationServiceClient { return c.generations }

// Models gives the stubs of the service that tells about models.
func (c *Client) Models() v1.ModelServiceClient { return c.models }

// Admin gives the stubs of the operators' service.
func (c *Client) Admin() v1.AdminServiceClient { return c.admin }

func dialOptions(chosen settings, addresses []string) []grpc.DialOption {
	transport := insecure.NewCredentials()
	if chosen.tls != nil {
		transport = credentials.NewTLS(chosen.tls)
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithDefaultServiceConfig(serviceConfig(chosen.balanced || len(addresses) > 0)),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(messageLimitBytes), grpc.MaxCallSendMsgSize(messageLimitBytes)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: keepaliveTime, Timeout: keepaliveTimeout}),
	}
	if len(addresses) > 0 {
		known := manual.NewBuilderWithScheme(several)
		state := resolver.State{}
		for _, address := range addresses {
			host, _, _ := net.SplitHostPort(address) // checked before
			state.Addresses = append(state.Addresses, resolver.Address{Addr: address, ServerName: host})
		}
		known.InitialState(state)
		options = append(options, grpc.WithResolvers(known))
	}
	if chosen.token != "" {
		options = append(options, grpc.WithPerRPCCredentials(bearer(chosen.token)))
	}
	return append(options, chosen.dial...)
}

// checkedTarget gives the target as gRPC takes it, and the addresses behind it where several were given.
func checkedTarget(target string) (string, []string, error) {
	if addresses := strings.Split(target, ","); len(addresses) > 1 {
		for _, address := range addresses {
			if _, _, err := net.SplitHostPort(address); err != nil {
				return "", nil, fmt.Errorf("mlxstream: several targets must each be HOST:PORT, not %q", address)
			}
		}
		return several + ":///servers", addresses, nil
	}
	if strings.Contains(target, "://") || strings.HasPrefix(target, "unix:") || strings.HasPrefix(target, "dns:") {
		return target, nil, nil
	}
	if _, port, err := net.SplitHostPort(target); err != nil || port == "" {
		return "", nil, fmt.Errorf("mlxstream: the target must be HOST:PORT or unix:PATH, not %q", target)
	}
	return target, nil, nil
}

// serviceConfig says when gRPC tries a call again: only while the server has not taken it up, and at a full server only
// if that says when to come back.
func serviceConfig(balanced bool) string {
	type object = map[string]any
	config := object{"methodConfig": []object{{
		"name": []object{{"service": "mlxstream.v1.GenerationService"}, {"service": "mlxstream.v1.ModelService"}},
		"retryPolicy": object{
			"maxAttempts":          4,
			"initialBackoff":       "0.1s",
			"maxBackoff":           "2s",
			"backoffMultiplier":    2,
			"retryableStatusCodes": []string{"UNAVAILABLE", "RESOURCE_EXHAUSTED"},
		},
	}}}
	if balanced {
		config["loadBalancingConfig"] = []object{{"round_robin": object{}}}
		config["healthCheckConfig"] = object{"serviceName": ReadinessService}
	}
	text, err := json.Marshal(config)
	if err != nil {
		panic(err) // a constant
	}
	return string(text)
}
